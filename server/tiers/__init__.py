"""Storage tiers."""
