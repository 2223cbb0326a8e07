"""What phases leave for the next ones: files that are whole or absent, and groups of tensors with checksums."""
