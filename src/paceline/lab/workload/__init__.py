"""What is sent, and when: drafts of requests from lengths, files and traces; due times; stages made of both."""
