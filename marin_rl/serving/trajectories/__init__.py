"""Server of the API that environments of atropos push to; groups are durable before an answer."""
