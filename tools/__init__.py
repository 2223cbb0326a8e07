"""How the built-in models and their pictures were made; run as `python -m tools.NAME` from the repository's root."""
