"""What training reads: documents as tokens, batches, mixtures, text files, tokenizers, problems."""
