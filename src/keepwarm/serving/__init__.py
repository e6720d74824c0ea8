"""The service: native, OpenAI's and Anthropic's protocols over one engine for each model."""
