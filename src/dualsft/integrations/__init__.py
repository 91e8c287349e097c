"""Other people's tools: Hugging Face Trainer and TRL."""
