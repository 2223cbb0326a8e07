"""Tests of the scripts that make and judge the built-in models."""
