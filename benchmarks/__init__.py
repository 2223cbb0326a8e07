"""Where the figures in the README and in docs/ come from: one command a table."""
