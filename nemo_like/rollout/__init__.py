"""From prompts to completions, rewards and rows."""
