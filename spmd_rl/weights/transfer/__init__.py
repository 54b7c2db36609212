"""Move weights from one layout to another: boxes, plan, messages, proof."""
