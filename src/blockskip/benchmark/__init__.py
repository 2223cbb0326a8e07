"""Jobs made of many runs."""
