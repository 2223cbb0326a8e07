"""Tests of blockskip.evaluation."""
