"""Networks: the policy, the value model, packed attention, log-probs and adapters."""
