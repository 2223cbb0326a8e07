"""Precomputed features: what stands in for the skipped blocks."""
