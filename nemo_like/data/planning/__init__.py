"""From row lengths to a `BatchPlan`: limits, bounds, schedule, ranks and steps."""
