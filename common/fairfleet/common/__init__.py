"""What server, client and lab share: models, codecs, the wire, credentials and error classes.

Nothing is exported here, so that a module loads only what it needs.
"""
