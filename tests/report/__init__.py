"""Tests of blockskip.report."""
