"""Rules that only choose weights, from reports and lengths."""
