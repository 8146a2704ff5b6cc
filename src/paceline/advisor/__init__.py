"""From measurements to a choice: capacity, cost, and why each runner-up lost."""
