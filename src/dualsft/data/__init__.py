"""From a path to tokenised examples: sources, readers, formats, chat templates."""
