"""The service: native, OpenAI's, Anthropic's and SGLang's protocols over one engine for each model."""
