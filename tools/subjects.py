"""The held-out subjects."""
HELD_OUT_SPRITES = ("1f99c","1f994","1f996","1f989","1f419","1f984","1f98a","1f422","1f9a9", "1f47e","1f409","1f432")
