"""Generation: the engine protocol, vLLM, clients of served models, and sampling."""
