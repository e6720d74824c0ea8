"""Remote tiers: services that machines share."""
