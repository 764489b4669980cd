"""Quality of models beside the full attention they use: perplexity by position, and lm-evaluation-harness."""
