"""DiT-BlockSkip (arXiv 2603.20755) in pure torch: patches, split, skipping, flow matching."""
