"""Reading models: where their files are, what they are, and only the parts that a phase needs."""
