"""Tests; their folders mirror src/blockskip."""
