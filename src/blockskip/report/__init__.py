"""What a run gave: one web page and the same figures as a terminal table."""
