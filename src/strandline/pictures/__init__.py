"""Pictures of requests: where they come from, how they are decoded, and to which size they are scaled."""
