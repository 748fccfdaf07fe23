"""Write the reference pages that follow from the code: settings, commands and errors.

    python -m docs.generate            writes them to docs/reference
    python -m docs.generate --check    exits with 1 if a page is not up to date

The pages are committed, so that they can be read in the repository. A test runs the check.
"""
