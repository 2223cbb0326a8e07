"""Judging pictures: how much they look like the subject."""
