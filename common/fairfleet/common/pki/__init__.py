"""Certificates, credentials, enrolment tokens and the files that keep them.

Nothing is exported here, because a program needs only some of the modules.
"""
