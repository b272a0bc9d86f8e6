// What well-known models cache for a token, from their published configurations, and what common cards hold.

/** `window`: how far back `sliding` of the layers look, which therefore hold no more than that. */
export const SHAPES = [
  { name: "GPT-2", layers: 12, heads: 12, kv_heads: 12, head_dim: 64 },
  { name: "SmolLM2 135M", layers: 30, heads: 9, kv_heads: 3, head_dim: 64 },
  { name: "SmolLM2 1.7B", layers: 24, heads: 32, kv_heads: 32, head_dim: 64 },
  { name: "Falcon 7B", layers: 32, heads: 71, kv_heads: 1, head_dim: 64 },
  { name: "Llama 2 7B", layers: 32, heads: 32, kv_heads: 32, head_dim: 128 },
  { name: "Llama 3.1 8B", layers: 32, heads: 32, kv_heads: 8, head_dim: 128 },
  { name: "Llama 3.1 70B", layers: 80, heads: 64, kv_heads: 8, head_dim: 128 },
  { name: "Llama 3.1 405B", layers: 126, heads: 128, kv_heads: 8, head_dim: 128 },
  { name: "Mistral 7B v0.1", layers: 32, heads: 32, kv_heads: 8, head_dim: 128, sliding: 32, window: 4096 },
  { name: "Qwen2.5 7B", layers: 28, heads: 28, kv_heads: 4, head_dim: 128 },
  { name: "Gemma 2 9B", layers: 42, heads: 16, kv_heads: 8, head_dim: 256, sliding: 21, window: 4096 },
  { name: "Gemma 3 27B", layers: 62, heads: 32, kv_heads: 16, head_dim: 128, sliding: 52, window: 1024 },
];

export const CARDS = [
  { name: "8 GB", bytes: 8e9 },
  { name: "24 GB (RTX 4090)", bytes: 24e9 },
  { name: "80 GB (H100)", bytes: 80e9 },
  { name: "141 GB (H200)", bytes: 141e9 },
];

/** Bytes that `rows` sequences of `tokens` tokens hold, at `bytes` a number: keys and values, in every layer. */
export function cacheBytes({ layers, kv_heads, head_dim, sliding = 0, window = 0 }, tokens, rows, bytes) {
  const held = (layers - sliding) * tokens + sliding * Math.min(tokens, window);
  return 2 * kv_heads * head_dim * bytes * held * rows;
}
