"""The modelling code that exported models carry: it needs torch and transformers, nothing of ours."""
