"""The roles of a worker, and what each of them needs: policy, critic, rollout, batch."""
