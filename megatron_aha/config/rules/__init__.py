"""What makes a configuration impossible, one module per section; see ``megatron_aha.config.validate``."""
