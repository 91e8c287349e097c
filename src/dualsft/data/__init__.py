"""From `data.path` to tokenized examples: sources, readers, formats, chat templates."""
