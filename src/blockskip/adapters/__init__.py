"""LoRA: which layers take it, what is saved, and adapters that belong to the base."""
