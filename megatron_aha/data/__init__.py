"""From text to batches: preprocessing, datasets with their checks, and the batches of a step."""
