"""The server's own test data: versions are evaluated in a worker process, beside the rounds."""
