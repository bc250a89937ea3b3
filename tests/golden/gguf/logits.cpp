// The logits that llama.cpp computes: logits MODEL.gguf TOKENS OUT. TOKENS is a file of int32 numbers, OUT receives the
// f32 logits of every position. One sequence, no flash attention, an f32 KV cache. Built by make.py.
#include <cstdint>
#include <cstdio>
#include <vector>

#include "llama.h"

static std::vector<int32_t> read_tokens(const char * path) {
    std::vector<int32_t> tokens;
    FILE * file = fopen(path, "rb");
    int32_t token;
    while (file && fread(&token, sizeof token, 1, file) == 1) tokens.push_back(token);
    if (file) fclose(file);
    return tokens;
}

int main(int argc, char ** argv) {
    if (argc != 4) return 2;
    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    // Repacked weights would be multiplied in another order.
    model_params.use_extra_bufts = false;
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    if (!model) return 1;
    std::vector<int32_t> tokens = read_tokens(argv[2]);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = 256;
    params.n_batch = params.n_ubatch = 128;
    params.n_threads = params.n_threads_batch = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.type_k = params.type_v = GGML_TYPE_F32;
    llama_context * context = llama_init_from_model(model, params);
    if (!context) return 1;
    llama_batch batch = llama_batch_init((int32_t) tokens.size(), 0, 1);
    for (size_t i = 0; i < tokens.size(); i++) {
        batch.token[i] = tokens[i];
        batch.pos[i] = (llama_pos) i;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i] = 1;
    }
    batch.n_tokens = (int32_t) tokens.size();
    if (llama_decode(context, batch) != 0) return 1;
    FILE * out = fopen(argv[3], "wb");
    int32_t vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (size_t i = 0; i < tokens.size(); i++) {
        fwrite(llama_get_logits_ith(context, (int32_t) i), sizeof(float), vocab, out);
    }
    fclose(out);
    return 0;
}
