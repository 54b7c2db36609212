"""The papers as pure functions: values in, values out. Only the per-token functions (policy_loss, kl) know torch."""
