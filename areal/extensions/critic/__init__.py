"""A critic: a value head estimates the return of each token, and `gae` makes advantages of the estimates."""
