"""From text to batches: datasets, tokenizers, the tokenised corpus, segments, batchings."""
