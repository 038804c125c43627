"""What several layouts use: messages along edges, and the degrees of modules beside a backbone."""
