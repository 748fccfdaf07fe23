"""Rules that compute a direction from inner products: common descent and projections."""
