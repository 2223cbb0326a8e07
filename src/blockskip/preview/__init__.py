"""Pictures drawn with the model: text, denoising and decoding, one part of the pipeline in memory at a time."""
