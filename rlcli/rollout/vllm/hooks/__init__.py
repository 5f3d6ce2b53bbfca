"""What is changed of vLLM, or heard of it, while it runs in a worker."""
