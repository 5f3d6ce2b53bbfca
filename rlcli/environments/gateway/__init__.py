"""A server for programs that speak OpenAI's protocol: the policy answers them, and its turns are recorded in tokens."""
