"""What operators do and may ask afterwards: the settings in force, the audit, continuing.

Nothing is exported here: each module is imported where it is used.
"""
