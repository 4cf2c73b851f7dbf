
_cyborg() {
    local cur=${COMP_WORDS[COMP_CWORD]} at='' name='' option='' word longer i
    COMPREPLY=()
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ $option ]]; then
            # --option=value is three words for bash.
            [[ $word == = ]] || option=''
        elif [[ $word == -* ]]; then
            [[ ${_cyborg_values["/$name $word"]+x} ]] && option=$word
        else
            longer="${at:+$at }$word"
            if [[ ${_cyborg_words["/$longer"]+x}${_cyborg_commands["/$longer"]+x} ]]; then
                at=$longer
                name=${_cyborg_commands["/$at"]:-}
            fi
        fi
    done
    if [[ $option ]]; then
        [[ $cur == = ]] && cur=''
        local values=${_cyborg_values["/$name $option"]}
        if [[ $values ]]; then
            mapfile -t COMPREPLY < <(compgen -W "$values" -- "$cur")
        else
            compopt -o filenames 2>/dev/null
            mapfile -t COMPREPLY < <(compgen -f -- "$cur")
        fi
    elif [[ $cur == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "${_cyborg_options["/$name"]:-}" -- "$cur")
    else
        mapfile -t COMPREPLY < <(compgen -W "${_cyborg_words["/$at"]:-}" -- "$cur")
    fi
}
complete -F _cyborg cyborg
