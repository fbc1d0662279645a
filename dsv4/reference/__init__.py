"""The formulas, one module a component: eager PyTorch that reads like the paper."""
