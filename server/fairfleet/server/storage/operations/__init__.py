"""What the database says of the federation's operation: audit, settings, limits, undone rounds."""
