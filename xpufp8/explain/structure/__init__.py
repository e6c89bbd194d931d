"""What a log is made of: prefixes of its lines, tracebacks, and the deployment it tells of."""
